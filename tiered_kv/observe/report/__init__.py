"""Pages that show what a replay or a bench measured: HTML files with plots, which fetch nothing and run no script."""
