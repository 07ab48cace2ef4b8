"""Pretraining of any method on images that a first stage released within the same budget (`init=` on the command line).

`pretrained` has the wrapper of a method, `gaussians` and `central_images` the first stages.
"""
