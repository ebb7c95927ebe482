"""What a recipe may add to the plain path, a room each; `build.py` and `build_models.py` choose them."""
