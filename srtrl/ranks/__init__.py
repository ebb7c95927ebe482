"""Several processes: who they are, what they share."""
