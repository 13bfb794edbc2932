"""How the weight gradients of linear layers are computed: accumulated inside the product, or in pieces."""
