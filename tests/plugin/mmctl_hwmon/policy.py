"""A quarter of the devices encode images, the queues are kept by modality."""

from mmctl.engine.schedule.policies import Policy

TWO_ENCODERS = Policy(
    name="two_encoders", routing="least_outstanding", encoders=0.25, by_modality=True, age_s=2.0
)
