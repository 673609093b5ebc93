"""Small programs for the compile harness, each with one known defect, or with none.

==================================================  ==========================================  ======================
defect                                              program                                     found as
==================================================  ==========================================  ======================
an output held over a replay                        ``loops.holding``, ``loops.comparing``      ``fail_lifetime``
an intermediate that a module keeps, read too late  ``storing.reading_late``                    ``fail_lifetime``
a result held by a closure, or fed back             ``storing.feeding_back``                    ``fail_lifetime``
what only looks like a copy of a result             ``keeping.ALIASES``                         ``fail_lifetime``
re-entrant calls in one backward                    ``loops.calling_in_backward``               ``fail_lifetime``
a mark before every forward of an accumulation      ``loops.marking_each_forward``              ``fail_lifetime``
a mark by telemetry while a backward is pending     ``loops.marking_telemetry``                 ``fail_lifetime``
a mark before each micro-batch                      ``loops.marking_each_micro_batch``          ``fail_lifetime``
accumulation with ``set_to_none`` and no mark       ``loops.accumulating_unmarked``             ``fail_lifetime``
a mark before the optimizer has used the gradients  ``loops.stepping_late``                     ``fail_lifetime``
compiled autograd under FSDP2 that trains nothing   ``sharded.blocks``, its autograd compiled   ``frozen`` (torch 2.11
                                                                                                raises: ``fail_error``)
a block under FSDP2 called past what is compiled    ``sharded.scoring``                         ``vacuous``
a module called past what is compiled               ``callings.by_method``                      ``vacuous``
a forward that is not compiled                      ``empty.DISABLED``                          ``vacuous``
a shape that changes in every step                  ``loops.growing``                           ``unstable``
one that no graph covers                            ``restless.SHAPE_STORM``                    ``vacuous``
a change after warm-up                              ``restless.LATE_CHANGE``                    ``unstable``
a graph break on a Python side effect               ``breaks.SIDE_EFFECT``                      ``pass``, with the line
a data-dependent branch                             ``breaks.BRANCH``                           ``pass``, with the line
a hook that breaks the graph                        ``breaks.HOOK``                             ``pass``, with the line
random draws of dropout                             ``peculiar.DROPOUT``                        ``pass``, with a note
an input updated in place                           ``peculiar.IN_PLACE``                       ``pass``, with a note
a module whose compiled gradient differs            ``unequal.WRONG_GRADIENT``                  ``fail_parity``
the same, beside draws that float64 has not         ``unequal.NOISY_WRONG_GRADIENT``            ``fail_parity``
parameters that training does not reach             ``frozen.CUT_OFF``                          ``frozen``
those that no loss depends on                       ``frozen.UNUSED``                           ``pass``, with a note
those of them that only compiled updates move       ``frozen.DECAYING``                         ``fail_parity``
a gradient that is lost for one shape only          ``frozen.CUT_OFF_FOR_ONE``                  ``frozen``
gradients that are not numbers                      ``empty.NO_SLOPE``                          ``vacuous``
none                                                ``clean``, ``registry.CLEAN``,              ``pass``
                                                    ``keeping.COPIES``, ``storing.INNOCENT``,
                                                    ``sharded.sequential``
==================================================  ==========================================  ======================

Those of ``loops`` need CUDA graphs; without a CUDA device they are found when the harness rehearses them.
"""
