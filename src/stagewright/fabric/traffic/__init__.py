"""What a fabric run sends: explicit sizes, a model, a plan or a Chakra trace."""
