"""Features that a recipe may add to the plain path, one room each; `build.py` and `build_models.py` choose them."""
