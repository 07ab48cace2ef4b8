"""`dpgen audit`: lower bounds on epsilon, from attacks on mechanisms; docs/audit.md says how to read them.

The accountants prove that a mechanism leaks at most some epsilon. An audit certifies, with a stated confidence, that it
leaks at least some epsilon. A certified value above the claimed one refutes the claim.
"""
