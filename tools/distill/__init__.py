"""Training of the embedded pair: corpus to tokenizer, target, distilled draft, model cards.

Not part of the wheel or the images. ``ssd.demo`` contains the result, and ``ssd_distill`` the
training. Run the modules from the root of the repository: ``python -m tools.distill.train`` trains
a pair and ``python -m tools.distill.package`` writes the folders of ``ssd/demo/weights``.
"""
