"""What a run is decided by: options, their file, combinations that cannot work."""
