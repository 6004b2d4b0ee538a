"""Real collectives of gloo over shaped links between network namespaces, on one machine."""
