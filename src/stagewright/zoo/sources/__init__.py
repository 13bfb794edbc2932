"""Models from elsewhere: Hugging Face, a user's factory, weights in a folder."""
