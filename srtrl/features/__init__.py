"""What a recipe may add to the plain path, a room each; `build.py` chooses them."""
