// Package user says who may move bytes: admission, slots, quotas, expiry, rates, and
// the ledger of what was moved.
//
// A user's definition (Spec) may change at any time; its account, with usage, debt and
// live flows, stays, found by the durable number. A flow that runs under a user holds
// a Lease on the account: the relay asks it before it takes bytes (Ready), says what
// it took (Took) and what has moved (Moved), and the account ends the flow through
// the lease's hook when the user is retired, disabled, expired or out of traffic.
package user
