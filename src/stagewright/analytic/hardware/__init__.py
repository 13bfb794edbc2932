"""What kernels and collectives cost on accelerators and networks, from data sheets and measured grids."""
