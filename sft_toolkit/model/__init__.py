"""The base model: where it is, how it is loaded, what lies inside its wrappers."""
