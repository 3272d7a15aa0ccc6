"""The settings that libai knows: names, types, limits and meaning, and the errors that tell a user about them."""
