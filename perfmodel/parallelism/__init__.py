"""How training is spread over ranks."""
