"""Pages of a replay, bench or simulation: HTML files with plots, which fetch nothing and run no script."""
