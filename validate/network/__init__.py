"""Real collectives of many ranks on this machine, judged beside the law of collectives."""
