"""Networks that more than one method may use. Each takes latents and labels to images: net(z, y).

Methods train them: raise `TRAINING_VERSION` in runs/config.py with any change of what one computes.
"""
