"""What a forecast needs to know about a model: measured here, scaled from measurements, or analytic."""
