"""Whether ids and labels are within what the model has rows for: OneFlow 0.9 does not look."""
