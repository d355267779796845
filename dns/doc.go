// Package dns is the place of the DNS service, the outbound with the empty tag. There
// is nothing in it yet.
package dns
