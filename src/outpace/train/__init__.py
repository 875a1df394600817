"""Training drafters on this machine: early-exit adapters, EAGLE-3 heads, small draft models.

data -> target's states -> kind (module and loss) -> trainer -> a folder that the engine serves
"""
