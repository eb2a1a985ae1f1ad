"""Models: what a checkpoint needs to run on pages, in our own lean form or in that of transformers."""
