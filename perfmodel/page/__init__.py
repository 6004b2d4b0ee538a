"""The what-if page: questions from a browser on this machine, answered by the model itself."""
