"""Ways to put the loop, or a judge alone, into other programs. The core knows nothing of them."""
