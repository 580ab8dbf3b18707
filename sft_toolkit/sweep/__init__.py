"""A search over values of a configuration: section `sweep`, through Optuna's ask and tell.

Not through `Trainer.hyperparameter_search`: that varies the arguments of one trainer, and its trials are checkpoints.
Here a trial is a run: any key of any section may vary, and it leaves all that a run leaves, in a folder of its own.
"""
