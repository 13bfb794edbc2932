"""What several studies share: values, measurements, training recipes, sentences."""
