"""Search for any number of stop strings in a text that grows, by the automaton of Aho and Corasick."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Automaton of strings.

    A state is the longest ending of the text so far that some string begins with; 0 is the empty one.

    empty    there is no string
    depth    of each state, its length
    longest  of each state, the length of the longest string that ends there, or 0
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.empty = not strings
        self._next: list[dict[str, int]] = [{}]
        self.depth, self.longest = [0], [0]
        for string in strings:
            state = 0
            for letter in string:
                if (after := self._next[state].get(letter)) is None:
                    after = self._next[state][letter] = len(self._next)
                    self._next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.longest.append(0)
                state = after
            self.longest[state] = len(string)
        # State of the longest shorter ending; states are taken by their depth.
        self._shorter = [0] * len(self._next)
        ordered = list(self._next[0].values())
        for state in ordered:
            for letter, after in self._next[state].items():
                shorter = self._shorter[after] = self._step(self._shorter[state], letter)
                self.longest[after] = self.longest[after] or self.longest[shorter]
                ordered.append(after)

    def advance(self, state: int, text: str, begin: int) -> tuple[int, int]:
        """(state, end) after the characters from `begin` on, or behind the first string that is complete."""
        for index in range(begin, len(text)):
            state = self._step(state, text[index])
            if self.longest[state]:
                return state, index + 1
        return state, len(text)

    def _step(self, state: int, letter: str) -> int:
        while state and letter not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(letter, 0)
