"""Why blocks were missed, and how many more a larger tier would find."""
