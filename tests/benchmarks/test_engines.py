"""benchmarks/engines.py: rows of one engine, and the table of two."""

import json

from benchmarks import engines


def test_a_row_is_the_first_token_and_the_further_ones(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(engines.time, "perf_counter", lambda: clock[0])
    asked = []

    def generate(prompts, new):
        asked.append(prompts)
        clock[0] += 0.010 + 0.002 * (new - 1)

    row = engines.measured(generate, 3, 5, repeats=2, vocab_size=100)
    assert (round(row["first_ms"], 6), round(row["per_token_ms"], 6)) == (10.0, 2.0)
    assert all(len(prompts) == 3 and {len(prompt) for prompt in prompts} == {5} for prompts in asked)
    assert (
        len({str(prompts) for prompts in asked}) == len(asked) == 8
    )  # new prompts each time, two calls of each uncounted


def test_the_table_prints_rows_that_are_lost_and_that_are_missing(tmp_path):
    def report(engine, rows):
        file = tmp_path / f"{engine}.json"
        rows = [dict(prompts=1, tokens=tokens, first_ms=first, per_token_ms=step) for tokens, first, step in rows]
        common = dict(model="qwen3-8b", world_size=1, device="a GPU", version="1.0")
        file.write_text(json.dumps({"engine": engine, "rows": rows, **common}))
        return file

    lines = engines.table([report("vllm", [(128, 4.0, 3.0)]), report("weft", [(128, 8.0, 2.0), (64, 1.0, 1.0)])])
    assert "| 1x128 | 8.0 / 2.00 | 4.0 / 3.00 (0.50 x, 1.50 x) |" in lines
    assert "| 1x64 | 1.0 / 1.00 | not measured |" in lines
