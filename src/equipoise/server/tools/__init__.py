"""Tool calls: the formats that models write them in, and reading them out of text that arrives in pieces."""
