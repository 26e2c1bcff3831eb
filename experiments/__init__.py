"""Programs that record evidence for the book, whose results lie in mgpu_lib/recorded."""
