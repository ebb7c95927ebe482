"""What a policy can talk to between its turns: the sandbox for the Python that it writes."""
