"""Find the side effects of a model's forward, and handle or refuse them."""
