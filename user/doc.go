// Package user is the place of users, with quotas, rates, slots and expiry. There is
// nothing in it yet.
package user
