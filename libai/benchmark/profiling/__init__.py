"""Measurements inside an iteration: what the loop adds to it, and how long single operations take."""
