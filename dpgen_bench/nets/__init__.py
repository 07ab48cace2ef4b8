"""Networks, losses and optimal transport that methods use. Generators map latents and labels to images: net(z, y).

After a change of what one of them computes, raise `TRAINING_VERSION` in config/spec.py, because methods train them.
"""
