"""What a loaded model computes, and how fast."""
