"""Programs that a model wrote, run with limits: `runner` starts them, `jail` isolates them."""
