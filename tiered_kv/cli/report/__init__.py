"""Pages of a replay or a simulation: HTML files with plots, which fetch nothing and run no script."""
