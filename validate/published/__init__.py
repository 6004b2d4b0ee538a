"""Judging the model by what others have published."""
