"""The gateway: an OpenAI-compatible HTTP front of one or more targets, and the playground.

It never imports torch. Requests are checked and converted in ``schemas``, sent by ``targets``, and
written as OpenAI objects by ``responses``.
"""
