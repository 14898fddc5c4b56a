"""Files of weights: where they are, what they hold, and how they are named."""
