"""Texts as tokens: tokenizers, chat templates, stop strings, grammars. It knows no engine."""
