package check

import (
	"bytes"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/pkg/cni"
	"tunnel.example/tunnel/pkg/services"
)

// masqueraded returns the networks among subnets that a rule of the edge masquerades: their packets leave the node
// with the node's address.
func masqueraded(subnets []netip.Prefix) (found []netip.Prefix, err error) {
	c, err := nftables.New()
	if err != nil {
		return nil, err
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, err
	}
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, err
	}
	chains = slices.DeleteFunc(chains, func(c *nftables.Chain) bool { return c.Table.Name != cni.RulesTable })
	if !slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == cni.RulesTable }) {
		return nil, nil
	}
	for _, chain := range chains {
		rules, listErr := c.GetRules(chain.Table, chain)
		err = errors.Join(err, listErr)
		for _, subnet := range subnets {
			if slices.ContainsFunc(rules, func(r *nftables.Rule) bool { return masquerades(r, subnet) }) {
				found = append(found, subnet)
			}
		}
	}
	return found, err
}

// redirected reads from the kernel the rules by which an edge serves Services, and the chains that come before them.
func redirected() (found redirects, err error) {
	c, err := nftables.New()
	if err != nil {
		return found, err
	}
	chains, err := c.ListChains()
	if err != nil {
		return found, err
	}
	translates := func(chain *nftables.Chain) bool {
		return chain.Type == nftables.ChainTypeNAT && chain.Hooknum != nil && chain.Priority != nil &&
			*chain.Hooknum != *nftables.ChainHookPostrouting // chains at this hook translate the source, not the target
	}
	at := make(map[nftables.ChainHook]nftables.ChainPriority) // the priority of the edge's chain at each hook
	for _, chain := range chains {
		if chain.Table.Name == services.RulesTable && translates(chain) {
			at[*chain.Hooknum], found.there = *chain.Priority, true
		}
	}
	for _, chain := range chains {
		if chain.Table.Name == services.RulesTable || chain.Table.Name == services.RulesTableDNS || !translates(chain) {
			continue
		}
		own, same := at[*chain.Hooknum]
		if !same || *chain.Priority > own {
			continue
		}
		rules, err := c.GetRules(chain.Table, chain)
		if err != nil {
			return found, err
		}
		if len(rules) > 0 {
			found.before = append(found.before, familyName(chain.Table.Family)+" "+chain.Table.Name+" "+chain.Name)
		}
	}
	return found, nil
}

// familyName returns the name of a family in the program nft.
func familyName(f nftables.TableFamily) string {
	switch f {
	case nftables.TableFamilyIPv4:
		return "ip"
	case nftables.TableFamilyIPv6:
		return "ip6"
	}
	return "inet" // no other family translates addresses
}

// writable returns an error that says why this user cannot write to a file or a folder; nil: the user can.
func writable(path string) error {
	if err := unix.Access(path, unix.W_OK); err != nil {
		return &fs.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}

// isLocked reports whether a process holds a lock on a file. A running edge holds a lock on the file of its state.
// isLocked itself holds a lock for a moment; an edge that starts at that moment waits.
func isLocked(path string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close() // ends the lock
	err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return true, nil
	}
	return false, err
}

func masquerades(rule *nftables.Rule, subnet netip.Prefix) bool {
	names := func(e expr.Any) bool {
		compare, ok := e.(*expr.Cmp)
		return ok && compare.Op == expr.CmpOpEq && bytes.Equal(compare.Data, subnet.Addr().AsSlice())
	}
	isMasquerade := func(e expr.Any) bool { _, ok := e.(*expr.Masq); return ok }
	return slices.ContainsFunc(rule.Exprs, names) && slices.ContainsFunc(rule.Exprs, isMasquerade)
}
