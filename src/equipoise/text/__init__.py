"""Text and tokens: tokenizers, incremental detokenizing, chat templates, without torch or transformers."""
