package cni

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Program is the file name of the plugin, which is its type in network configurations.
const Program = "tunnel-cni"

// ListFile is the name of the network configuration that an edge writes. Runtimes take the file that sorts
// first.
const ListFile = "10-tunnel.conflist"

// Rival returns the name of a network configuration in a folder that sorts before ListFile; "" if there is none. It
// looks at the same files as runtimes (libcni.ConfFiles): at names that begin with a dot, too, but at no folders.
func Rival(confDir string) (string, error) {
	entries, err := os.ReadDir(confDir) // sorted by name
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		if e.Name() >= ListFile {
			break
		}
		if !e.IsDir() && slices.Contains([]string{".conf", ".conflist", ".json"}, filepath.Ext(e.Name())) {
			return e.Name(), nil
		}
	}
	return "", nil
}

// RulesTable is the name of the nftables table (family inet) with the rules of an edge.
const RulesTable = "tunnel-cni"

// ListName is the name of the network in that file.
const ListName = "tunnel"

// list is a network configuration list. Runtimes up to containerd 1.7 read cniVersion; newer ones choose the
// highest of cniVersions that they know.
type list struct {
	CNIVersion  string   `json:"cniVersion"`
	CNIVersions []string `json:"cniVersions"`
	Name        string   `json:"name"`
	Plugins     []plugin `json:"plugins"`
}

type plugin struct {
	Type         string          `json:"type"`
	Subnets      []netip.Prefix  `json:"subnets,omitempty"`
	Capabilities map[string]bool `json:"capabilities,omitempty"`
}

// NewConf returns the configuration for these subnets, with the defaults.
func NewConf(subnets []netip.Prefix) (*Conf, error) {
	conf := &Conf{Bridge: DefaultBridge, DataDir: DefaultDataDir, Subnets: subnets}
	conf.Name = ListName
	if len(subnets) == 0 {
		return nil, fmt.Errorf("no networks for pods")
	}
	return conf, conf.validate()
}

// Stock plugins that an edge can chain behind Program.
const (
	Portmap   = "portmap"   // ports of the host
	Bandwidth = "bandwidth" // limits of a pod's bandwidth
)

// stock returns the stock plugins in the order of the chain, each with its capability.
func stock() []plugin {
	return []plugin{
		{Type: Portmap, Capabilities: map[string]bool{"portMappings": true}},
		{Type: Bandwidth, Capabilities: map[string]bool{"bandwidth": true}},
	}
}

// List is what differs between the network configurations that edges write.
type List struct {
	Subnets []netip.Prefix
	// Chained has the names of the stock plugins in the chain. The values are the versions of the CNI specification that
	// each plugin speaks.
	Chained map[string][]string
}

// With returns the list with one more stock plugin in the chain.
func (l List) With(program string, versions []string) List {
	chained := map[string][]string{program: versions}
	for other, speaks := range l.Chained {
		if other != program {
			chained[other] = speaks
		}
	}
	return List{l.Subnets, chained}
}

// Marshal returns the network configuration. It names only versions that all plugins of the chain speak, since a
// runtime uses the highest version of the file for the whole chain.
func (l List) Marshal() ([]byte, error) {
	if _, err := NewConf(l.Subnets); err != nil {
		return nil, err
	}
	out := list{Name: ListName, Plugins: []plugin{{Type: Program, Subnets: l.Subnets}}}
	common := Versions().SupportedVersions()
	for _, p := range stock() {
		speaks, ok := l.Chained[p.Type]
		if !ok {
			continue
		}
		both := slices.DeleteFunc(slices.Clone(common), func(v string) bool { return !slices.Contains(speaks, v) })
		if len(both) == 0 {
			return nil, fmt.Errorf("the plugins have no version of the CNI specification in common: "+
				"the plugins before %s speak %q, "+
				"%s speaks %q", p.Type, common, p.Type, speaks)
		}
		common, out.Plugins = both, append(out.Plugins, p)
	}
	out.CNIVersions = announced(common)
	out.CNIVersion = out.CNIVersions[0]
	data, err := json.MarshalIndent(out, "", "  ")
	return append(data, '\n'), err
}

// announced returns the versions for the file. common are the versions that all plugins speak. If common has a version
// from 1.0.0 on, announced leaves out the earlier versions; otherwise it returns only the highest.
func announced(common []string) []string {
	early := func(version string) bool { return strings.HasPrefix(version, "0.") }
	if i := slices.IndexFunc(common, func(v string) bool { return !early(v) }); i >= 0 {
		return common[i:]
	}
	return common[max(0, len(common)-1):]
}

// UnmarshalList reads a network configuration that an edge has written. In the result, each chained plugin speaks the
// versions that the file names.
func UnmarshalList(data []byte) (l List, err error) {
	var in list
	if err := json.Unmarshal(data, &in); err != nil {
		return List{}, err
	}
	for _, p := range in.Plugins {
		switch p.Type {
		case Program:
			conf, err := NewConf(p.Subnets)
			if err != nil {
				return List{}, err
			}
			l.Subnets = conf.Subnets
		case Portmap, Bandwidth:
			l = l.With(p.Type, append([]string{in.CNIVersion}, in.CNIVersions...))
		}
	}
	if l.Subnets == nil {
		return List{}, fmt.Errorf("no plugin %s", Program)
	}
	return l, nil
}

// ConfIn returns the configuration of the plugin in a network configuration, whoever has written it.
func ConfIn(data []byte) (*Conf, error) {
	var in struct{ Plugins []json.RawMessage }
	if err := json.Unmarshal(data, &in); err != nil {
		return nil, err
	}
	for _, raw := range in.Plugins {
		var p plugin
		if err := json.Unmarshal(raw, &p); err == nil && p.Type == Program {
			return parseConf(raw)
		}
	}
	return nil, fmt.Errorf("no plugin %s", Program)
}

// Foreign looks for something in a network configuration that no edge writes, such as a key or a plugin, and returns
// it. Then a person has written the file. It returns "" if there is nothing, also for a damaged file.
func Foreign(data []byte) string {
	if !json.Valid(data) {
		return ""
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	var in list
	if err := decoder.Decode(&in); err != nil {
		return err.Error()
	}
	if in.Name != ListName {
		return fmt.Sprintf("the name %q", in.Name)
	}
	for _, p := range in.Plugins {
		known := append(stock(), plugin{Type: Program})
		i := slices.IndexFunc(known, func(k plugin) bool { return k.Type == p.Type })
		if i < 0 {
			return fmt.Sprintf("the plugin %q", p.Type)
		}
		for capability := range p.Capabilities {
			if !known[i].Capabilities[capability] {
				return fmt.Sprintf("the capability %q", capability)
			}
		}
	}
	return ""
}
