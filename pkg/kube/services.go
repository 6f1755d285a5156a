package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/tunnel"
)

// ServiceSink gets the items of package services.
type ServiceSink interface {
	Set(p services.Path, value []byte) // adds or changes an item; it may be the same as before
	Delete(p services.Path)            // removes an item
	Synced()                           // says that all objects have been read once
}

// Services follows the Services of the cluster, their EndpointSlices and the Nodes, and gives a sink the items that
// edges need. service_items.go makes the items. The sink has the endpoints of a Service only while it has the Service.
// Services keeps the items of endpoints, and no objects.
type Services struct {
	// Set once.
	client     *Client
	namespaces []string // the sink gets only the Services of these namespaces; nil: all
	sink       ServiceSink
	counters   *tunnel.Counters
	log        *slog.Logger
	tooLarge   tunnel.Limiter // limits log lines about objects that are too large

	mu       sync.Mutex       // guards the following; held during calls of the sink, which keeps their order
	services map[string]told  // the Services that the sink has, by NAMESPACE/NAME
	slices   map[string]slice // all EndpointSlices by NAMESPACE/NAME, even if the sink lacks their Service
	// of maps a Service to its EndpointSlices, both as NAMESPACE/NAME.
	of       map[string]map[string]struct{}
	nodeless map[string]struct{} // the EndpointSlices with endpoints in slice.nodeless
	sizes    map[string]int      // bytes of the items of endpoints, by NAMESPACE/NAME of their Service and by NAMESPACE/
	nodes    map[string]struct{}
	owners   *podOwners
	read     map[string]bool  // the kinds that have been read once
	errs     map[string]error // why the objects of a kind may be out of date; no entry: they are up to date
}

// told is the part of a Service that Services keeps.
type told struct {
	headless bool // it has no ClusterIP
}

// slice is the part of an EndpointSlice that Services keeps.
type slice struct {
	service   string // NAMESPACE/NAME
	headless  bool   // it has the label service.kubernetes.io/headless
	endpoints map[services.Path][]byte
	size      int                                  // bytes of endpoints, with their paths
	nodeless  map[services.Path]*services.Endpoint // the endpoints whose node the slice does not say
}

// The kinds of objects, as messages name them.
const (
	kindServices = "Services"
	kindSlices   = "EndpointSlices"
	kindNodes    = "Nodes"
)

// Services follows the Services of some namespaces; nil: of all. The sink gets nothing before Run. counters counts
// panics.
func (c *Client) Services(
	namespaces []string, sink ServiceSink, counters *tunnel.Counters, log *slog.Logger,
) *Services {
	return &Services{
		client: c, namespaces: namespaces, sink: sink, counters: counters, log: log,
		services: make(map[string]told), slices: make(map[string]slice), of: make(map[string]map[string]struct{}),
		nodeless: make(map[string]struct{}), sizes: make(map[string]int), nodes: make(map[string]struct{}),
		owners: newPodOwners(),
		read:   make(map[string]bool), errs: make(map[string]error),
	}
}

// serviceName is the label of an EndpointSlice with the name of its Service.
const serviceName = "kubernetes.io/service-name"

// Run implements tunnel.Module.
func (s *Services) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	follow := func(path, selector string, list func() runtime.Object, example runtime.Object, store *serviceStore) {
		running.Go(func() {
			s.client.followObjects(ctx, s.client.wholeObjects(path, list), metav1.ListOptions{LabelSelector: selector},
				example, store, func(err error) { s.noteResult(store.kind, err) })
		})
	}
	follow(servicesPath, "", func() runtime.Object { return new(serviceList) }, &serviceObject{}, s.serviceStore())
	follow(endpointSlicesPath, serviceName, func() runtime.Object { return new(sliceList) }, &sliceObject{},
		s.sliceStore())
	follow(nodesPath, "", func() runtime.Object { return new(nodeList) }, &nodeObject{}, s.nodeStore())
	return nil
}

// Name implements tunnel.Module.
func (*Services) Name() string { return "services" }

// Note returns why the items may be out of date; "" if they are up to date.
func (s *Services) Note() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, kind := range []string{kindServices, kindSlices, kindNodes} {
		if err := s.errs[kind]; err != nil {
			return fmt.Sprintf("the %s of the cluster cannot be read: %v", kind, Explain(err))
		}
	}
	return ""
}

// noteResult stores the outcome of a request. It logs the first failure and the first success after a failure.
func (s *Services) noteResult(kind string, err error) {
	s.mu.Lock()
	before := s.errs[kind]
	if s.errs[kind] = err; err == nil {
		delete(s.errs, kind)
	}
	s.mu.Unlock()
	switch {
	case err != nil && before == nil:
		s.log.Warn("the "+kind+" of the cluster cannot be read; edges keep what they know", "err", Explain(err))
	case err == nil && before != nil:
		s.log.Info("the " + kind + " of the cluster can be read again")
	}
}

// serviceStore is the store of a reflector, for one kind of objects.
type serviceStore struct {
	s    *Services
	kind string
	// The funcs are called with s.mu held. A key is a result of keyOf.
	set    func(key string, o any) error
	remove func(key string)
	keys   func() []string // returns the keys of all known objects
}

func (st *serviceStore) Add(o any) error { return st.Update(o) }
func (st *serviceStore) Resync() error   { return nil }

func (st *serviceStore) Update(o any) error {
	st.s.mu.Lock()
	defer st.s.mu.Unlock()
	_, err := st.setLocked(o)
	return err
}

// setLocked calls set, and recovers its panics: client-go would end the process at a panic, and users of the cluster
// write the objects. Edges do not get an object that causes a panic. The caller holds mu.
func (st *serviceStore) setLocked(o any) (key string, err error) {
	key, err = keyOf(o)
	if err != nil {
		return "", err
	}
	st.guard("edges are not told of a change of the object "+key, func() { err = st.set(key, o) })
	return key, err
}

// guard runs f. It logs and counts a panic of f. In the log, what names the effect of the panic.
func (st *serviceStore) guard(what string, f func()) {
	run := func() error { f(); return nil }
	tunnel.Guard(st.s.log, st.s.counters, what, run) //nolint:errcheck // it is logged
}

func (st *serviceStore) Delete(o any) error {
	key, err := keyOf(o)
	if err != nil {
		return err
	}
	st.s.mu.Lock()
	defer st.s.mu.Unlock()
	st.removeLocked(key)
	return nil
}

// removeLocked calls remove. It guards against panics as setLocked does. The caller holds mu.
func (st *serviceStore) removeLocked(key string) {
	st.guard("edges are not told that the object "+key+" was deleted", func() { st.remove(key) })
}

// Replace replaces all objects: the reflector calls it with each complete list, also after a gap.
func (st *serviceStore) Replace(all []any, _ string) error {
	st.s.mu.Lock()
	defer st.s.mu.Unlock()
	there := make(map[string]struct{}, len(all))
	if st.kind == kindSlices {
		st.s.leaveRoom(all)
	}
	for _, o := range all {
		key, err := st.setLocked(o)
		if err != nil {
			return err
		}
		there[key] = struct{}{}
	}
	for _, key := range st.keys() {
		if _, ok := there[key]; !ok {
			st.removeLocked(key)
		}
	}
	if st.s.read[st.kind] = true; len(st.s.read) == 3 {
		st.s.sink.Synced()
	}
	return nil
}

// keyOf returns NAMESPACE/NAME of an object; /NAME if it has no namespace.
func keyOf(o any) (string, error) {
	object, ok := o.(metav1.Object)
	if !ok {
		return "", errors.New("not an object")
	}
	return object.GetNamespace() + "/" + object.GetName(), nil
}

// tells reports whether the sink gets objects of a namespace.
func (s *Services) tells(namespace string) bool {
	return s.namespaces == nil || slices.Contains(s.namespaces, namespace)
}

// has reports whether the sink has the endpoints of a slice. If the slice has the label service.kubernetes.io/headless
// and its Service has a ClusterIP, the sink lacks them: kube-proxy ignores such a slice, too. The caller holds mu.
func (s *Services) has(of slice) bool {
	service, ok := s.services[of.service]
	return ok && (service.headless || !of.headless)
}

func (s *Services) serviceStore() *serviceStore {
	path := func(key string) services.Path { return services.ServicePath(cut(key)) }
	remove := func(key string) {
		if _, ok := s.services[key]; !ok {
			return
		}
		for name := range s.of[key] {
			if of := s.slices[name]; s.has(of) {
				for p := range of.endpoints {
					s.sink.Delete(p)
				}
			}
		}
		delete(s.services, key)
		s.sink.Delete(path(key))
	}
	return &serviceStore{s: s, kind: kindServices, remove: remove,
		set: func(key string, o any) error {
			object, ok := o.(*serviceObject)
			if !ok {
				return errors.New("not a Service")
			}
			item := object.item()
			s.cutAddresses(key, item)
			value := s.item(key, item)
			if len(object.Spec.Ports) > services.MaxPorts {
				s.leaveOut(key, fmt.Errorf("it has %d ports, and may have %d", len(object.Spec.Ports), services.MaxPorts))
				value = nil
			}
			if value == nil || !s.tells(object.Namespace) {
				remove(key)
				return nil
			}
			had := make(map[string]bool, len(s.of[key]))
			for name := range s.of[key] {
				had[name] = s.has(s.slices[name])
			}
			s.services[key] = told{headless: object.Spec.ClusterIP == noClusterIP}
			for name, had := range had {
				of := s.slices[name]
				has := s.has(of)
				for p, endpoint := range of.endpoints {
					switch {
					case has && !had:
						s.sink.Set(p, endpoint)
					case had && !has:
						s.sink.Delete(p)
					}
				}
			}
			s.sink.Set(path(key), value) // after its endpoints: until then, nobody refuses its connections
			return nil
		},
		keys: func() []string { return keysOf(s.services) },
	}
}

func (s *Services) sliceStore() *serviceStore {
	// put stores a slice; nil endpoints remove it.
	put := func(key string, now slice) {
		before := s.slices[key]
		if !s.resize(before, now) {
			s.leaveOut(key, fmt.Errorf("its Service may have %d bytes of endpoints, and its namespace %d",
				maxServiceSize, maxNamespaceSize))
			now.endpoints, now.nodeless, now.size = nil, nil, 0
			s.resize(before, now)
		}
		had, has := s.has(before), s.has(now)
		// The sink passes each call on to edges at once, so new endpoints come before old ones go.
		for p, value := range now.endpoints {
			if has && !(had && bytes.Equal(before.endpoints[p], value)) {
				s.sink.Set(p, value)
			}
		}
		for p := range before.endpoints {
			if _, stays := now.endpoints[p]; had && !(has && stays) {
				s.sink.Delete(p)
			}
		}
		if before.service != now.service {
			delete(s.of[before.service], key)
			if len(s.of[before.service]) == 0 {
				delete(s.of, before.service)
			}
		}
		if delete(s.nodeless, key); len(now.nodeless) > 0 {
			s.nodeless[key] = struct{}{}
		}
		if now.service == "" {
			delete(s.slices, key)
			return
		}
		if s.of[now.service] == nil {
			s.of[now.service] = make(map[string]struct{})
		}
		s.of[now.service][key] = struct{}{}
		s.slices[key] = now
	}
	return &serviceStore{s: s, kind: kindSlices,
		set: func(key string, o any) error {
			object, ok := o.(*sliceObject)
			if !ok {
				return errors.New("not an EndpointSlice")
			}
			now := slice{endpoints: make(map[services.Path][]byte), nodeless: make(map[services.Path]*services.Endpoint)}
			if service := object.Labels[serviceName]; service != "" && s.tells(object.Namespace) {
				now.service = object.Namespace + "/" + service
				_, now.headless = object.Labels[headlessLabel]
				items := object.items()
				if len(object.Ports) > services.MaxPorts {
					s.leaveOut(key, fmt.Errorf("it has %d ports, and may have %d", len(object.Ports), services.MaxPorts))
					items = nil
				}
				for _, e := range items {
					p := services.EndpointPath(object.Namespace, service, object.Name, e.GetAddress())
					if e.GetNode() == "" && now.service != apiService {
						e.Home, now.nodeless[p] = s.owners.owner(e.GetAddress()), e
					}
					if value := s.item(key, e); value != nil {
						now.endpoints[p] = value
						now.size += len(p) + len(value)
					}
				}
			}
			put(key, now)
			return nil
		},
		remove: func(key string) { put(key, slice{}) },
		keys:   func() []string { return keysOf(s.slices) },
	}
}

// What people with rights in one namespace can write is bounded, since the cloud and every edge keep it, and compare
// the ports of a Service with those of all its endpoints at each change.
const (
	// maxServiceSize is the most bytes of the endpoints of a Service: some 6,000 endpoints with one port.
	maxServiceSize = 1 << 20
	// maxNamespaceSize is the most bytes of the endpoints of a namespace: some 100,000 endpoints with one port.
	maxNamespaceSize = 16 << 20
)

// resize counts a slice that replaces another. It returns false and counts nothing if the slice is too large beside
// the others of its Service or namespace. The caller holds mu.
func (s *Services) resize(before, now slice) bool {
	grown := map[string]int{}
	for _, change := range []struct {
		of slice
		n  int
	}{{before, -before.size}, {now, now.size}} {
		namespace, _ := cut(change.of.service)
		grown[change.of.service] += change.n
		grown[namespace+"/"] += change.n
	}
	for of, n := range grown {
		limit := maxServiceSize
		if strings.HasSuffix(of, "/") {
			limit = maxNamespaceSize
		}
		if n > 0 && s.sizes[of]+n > limit {
			return false
		}
	}
	for of, n := range grown {
		if s.sizes[of] += n; s.sizes[of] == 0 {
			delete(s.sizes, of)
		}
	}
	return true
}

// leaveRoom takes the slices that are missing in a new list out of the count. Replace sets the slices of the list
// before it removes the missing ones, and the new ones may need their room. The caller holds mu.
func (s *Services) leaveRoom(list []any) {
	there := make(map[string]bool, len(list))
	for _, o := range list {
		if key, err := keyOf(o); err == nil {
			there[key] = true
		}
	}
	for key, of := range s.slices {
		if !there[key] {
			s.resize(of, slice{service: of.service})
			of.size = 0
			s.slices[key] = of
		}
	}
}

// apiService is the Service of the API servers. Its endpoints are on no edge node, whatever a Node claims.
const apiService = "default/kubernetes"

// setOwner replaces what owners knows of a Node: the networks of its pods, or the addresses of a control-plane Node.
// After a change, setOwner looks again for the Node of each endpoint whose slice names none. The caller holds mu.
func (s *Services) setOwner(node string, networks []netip.Prefix, control []netip.Addr) {
	changed := s.owners.setControl(node, control)
	if !s.owners.set(node, networks) && !changed {
		return
	}
	for key := range s.nodeless {
		of := s.slices[key]
		has := s.has(of)
		for p, e := range of.nodeless {
			home := s.owners.owner(e.GetAddress())
			if home == e.GetHome() {
				continue
			}
			e.Home = home
			value := s.item(key, e)
			if value == nil {
				continue
			}
			if of.endpoints[p] = value; has {
				s.sink.Set(p, value)
			}
		}
	}
}

func (s *Services) nodeStore() *serviceStore {
	path := func(key string) services.Path {
		_, name := cut(key)
		return services.NodePath(name)
	}
	remove := func(key string) {
		if _, ok := s.nodes[key]; ok {
			delete(s.nodes, key)
			s.sink.Delete(path(key))
			_, name := cut(key)
			s.setOwner(name, nil, nil)
		}
	}
	return &serviceStore{s: s, kind: kindNodes,
		set: func(key string, o any) error {
			object, ok := o.(*nodeObject)
			if !ok {
				return errors.New("not a Node")
			}
			value := s.item(key, object.item())
			if value == nil {
				remove(key)
				return nil
			}
			s.nodes[key] = struct{}{}
			s.sink.Set(path(key), value)
			s.setOwner(object.Name, object.podNetworks(), object.controlAddresses())
			return nil
		},
		remove: remove,
		keys:   func() []string { return keysOf(s.nodes) },
	}
}

// cut splits a key of keyOf.
func cut(key string) (namespace, name string) {
	namespace, name, _ = strings.Cut(key, "/")
	return namespace, name
}

func keysOf[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	return keys
}
