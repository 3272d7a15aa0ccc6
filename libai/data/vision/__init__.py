"""Images: datasets and augmentation."""
