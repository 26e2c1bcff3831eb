"""Programs that record evidence for the book, and what they recorded (see `results`)."""
