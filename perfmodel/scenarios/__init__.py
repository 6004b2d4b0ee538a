"""Changes to a question, and what they do to the answer."""
