"""Networks that more than one method may use. Each takes latents and labels to images: net(z, y)."""
